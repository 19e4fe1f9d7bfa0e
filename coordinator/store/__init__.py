"""The coordinator's durable state: tables, records, transactions. No decision is made here."""
