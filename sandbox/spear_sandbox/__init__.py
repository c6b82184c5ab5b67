"""Isolated execution of model-written Python: isolation, server and client.

This room stands alone: it imports nothing of the other distributions. ``spear_sandbox.protocol``
says what an executor takes and gives; ``spear_sandbox.local`` runs programs on this machine, ``spear_sandbox.client``
through a service, and ``spear_sandbox.blocking`` is either for code that is not asynchronous. What runs behind the
isolation is ``spear_sandbox.guest``.
"""
