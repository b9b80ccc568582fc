"""How things look in a notebook and a terminal; imports nothing else of kwflow."""
