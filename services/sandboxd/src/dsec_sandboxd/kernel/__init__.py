"""The narrow seam to the kernel."""
