/** The Web Worker that seals reports; see sealer.ts. */
import { sealHere, type SealAnswer, type SealOrder } from "./sealer.js";

const send = (answer: SealAnswer): void => {
  (self as unknown as { postMessage: (answer: SealAnswer) => void }).postMessage(answer);
};

self.onmessage = ({ data: { id, target, contents } }: MessageEvent<SealOrder>) => {
  sealHere(target, contents).then(
    (report) => {
      send({ id, report });
    },
    () => {
      send({ id, fault: "the report could not be sealed" }); // An error's text could hold a report.
    },
  );
};
