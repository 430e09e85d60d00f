"""ASDL, the language of agent contracts: YAML that says what an agent can do, needs and may do.

:mod:`~dsec_common.asdl.model` is the list of its fields, :mod:`~dsec_common.asdl.reading` turns
files into contracts or into all that is wrong with them, :mod:`~dsec_common.asdl.terms` says what
the platform enforces. Nothing here does I/O.
"""
