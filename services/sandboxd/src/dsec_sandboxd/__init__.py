"""The node daemon: layers, sandboxes, commands and files of one machine."""
