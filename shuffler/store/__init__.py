"""The shuffler's durable state and its transactions; no HTTP, no clock, no decision of a rule."""
