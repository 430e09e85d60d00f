"""The content-addressed store of EROFS layers."""

from dsec_sandboxd.layers.limits import ImportLimits, ImportProgress
from dsec_sandboxd.layers.records import ImportedLayer, Layer
from dsec_sandboxd.layers.store import LayerStore

__all__ = ["ImportLimits", "ImportProgress", "ImportedLayer", "Layer", "LayerStore"]
