"""The resource broker: nodes and GPUs as Compute Units, and leases on them."""
