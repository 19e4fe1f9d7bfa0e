"""The shuffler's durable state and its transactions, without HTTP, clock or decisions."""
