"""A provider for genapi in a package of its own, and a small server that speaks its protocol."""

__all__ = ()
