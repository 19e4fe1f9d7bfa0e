"""The papers' figures, computed anew: `catalogue` lists them, `sweep` computes, `write` writes."""
