"""The coordinator: decides deployments, counts batches, keeps the ledger."""
