"""What this machine is made of: GPUs through NVML, processors, memory, disk."""
