"""Engines: anything that turns prompt token ids into response token ids.

``base`` has the seam, ``batching`` gathers concurrent calls, ``hf`` runs transformers models, ``scripted`` runs
policies written in Python, ``bytes`` is a tokenizer for policies that need none.  Only ``hf`` imports transformers,
only ``hf`` and ``sampling`` torch.
"""
