"""The content-addressed store of EROFS layers."""
