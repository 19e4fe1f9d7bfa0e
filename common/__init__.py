"""What two or more roles of Riffle must agree on: words, formats, mechanism, accounting."""
