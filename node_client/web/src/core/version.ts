/** Version of the protocol (docs/protocol.md, section 17). */
export const PROTOCOL_VERSION = 1;
