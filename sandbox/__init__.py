"""Isolated execution of model-written Python: isolation, server and client.

This room stands alone: it imports nothing of ``spear_envs``, ``agents`` or ``training``. ``sandbox.protocol`` says what
an executor takes and gives; ``sandbox.local`` runs programs on this machine, ``sandbox.client`` through a service, and
``sandbox.blocking`` is either for code that is not asynchronous. What runs behind the isolation is ``sandbox.guest``.
"""
