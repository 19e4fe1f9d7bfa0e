"""Files and processes of a network: secrets, certificates, loopback network, locks, checks."""
