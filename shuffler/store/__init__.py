"""The shuffler's durable state: batches, leases, uploads, users, and the secrets of batches."""
