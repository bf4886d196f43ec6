"""How fast an artifact runs here: prefill and decode measured apart, beside what the machine allows."""
