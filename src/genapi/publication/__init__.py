"""Publication as data: what is asked of whom in which order, and what answers prove. No I/O."""
