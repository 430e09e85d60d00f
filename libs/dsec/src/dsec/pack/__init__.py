"""Packages: an agent's code and all that it imports, as one file that is the same bytes each time.

``dsec-pack build``, :func:`dsec.pack.building.build_package`, makes one; it is read by
:func:`dsec.pack.package.read_package`, and becomes a layer by
:meth:`dsec.layers.Layers.import_package`.
"""
