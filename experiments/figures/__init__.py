"""The papers' figures, recomputed: `catalogue` lists them, `sweep` computes, `write` writes."""
