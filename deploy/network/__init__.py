"""Files and processes of a network: secrets, certificates, loopback services, checks."""
