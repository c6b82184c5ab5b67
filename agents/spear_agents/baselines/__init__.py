"""Prompting baselines of the paper, over any engine: I/O, ReAct, Reflexion."""
