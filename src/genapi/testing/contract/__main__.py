"""Print the capability matrix, as the page of the docs has it."""

from . import PROFILES, capabilities

__all__ = ()

if __name__ == "__main__":
    print(capabilities(PROFILES), end="")
