"""``dsec simulate``: the cores of broker and scheduler on a virtual clock."""
