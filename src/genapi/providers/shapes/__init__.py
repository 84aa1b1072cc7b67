"""Wire shapes that more than one provider speaks, each module named after its shape."""
