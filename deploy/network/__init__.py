"""A network's files and processes: secrets, certificates, services on loopback, their health."""
