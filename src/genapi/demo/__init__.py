"""The demo: a whole reinforcement learning loop over genapi's public names.

`python -m genapi.demo` runs it; docs/tutorial/demo.md reads its table.
"""
