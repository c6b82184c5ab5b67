"""Engines, which turn prompt token ids into response token ids.

``base`` has the interface, ``batching`` gathers concurrent calls, ``hf`` runs transformers models, ``scripted`` runs
policies written in Python, ``bytes`` is a tokenizer for policies without one, ``vision`` prepares pictures for
Qwen2.5-VL, ``weights`` updates a running engine. Only ``hf`` and ``vision`` import transformers, only
``hf``, ``sampling`` and ``weights`` torch.
"""
