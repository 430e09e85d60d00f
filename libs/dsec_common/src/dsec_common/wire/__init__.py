"""Every message of the platform; this package imports no transport."""
