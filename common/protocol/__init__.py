"""What two roles must agree on, byte by byte: documents, frames, seals, errors. No I/O."""
