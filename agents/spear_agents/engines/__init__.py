"""Engines: anything that turns prompt token ids into response token ids.

``base`` has the seam, ``batching`` gathers concurrent calls, ``hf`` runs transformers models, ``scripted`` runs
policies written in Python, ``bytes`` is a tokenizer for policies that need none, ``vision`` prepares pictures for
Qwen2.5-VL, ``weights`` brings new ones into a running engine. Only ``hf`` and ``vision`` import transformers, only
``hf``, ``sampling`` and ``weights`` torch.
"""
