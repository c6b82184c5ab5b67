"""SPEAR inside verl 0.9.1, through verl's own registries: no fork, no patched copy.

Two of verl's names are replaced where it has no hook (:mod:`.workers`): how a worker joins its process group and how a
value head is loaded.

verl loads this package in every process (driver and Ray workers) when
``VERL_USE_EXTERNAL_MODULES=spear_training.verl_plugin`` is set, which :mod:`spear_training.verl_plugin.process` does.
The first line must import verl: a Ray actor that unpickles one of our classes enters a submodule first, that imports
verl, verl loads this plugin, and without the line the plugin would find the submodule half made. The platform comes
before anything of verl that asks for a device.
"""

import verl  # noqa: F401  (must stay first)

from spear_sandbox.errors import guard_logs
from spear_training.run.supervise import add_code_folder, read_secrets
from spear_training.verl_plugin import platform, rollout_servers, trainer, workers  # noqa: F401

guard_logs()
read_secrets()
add_code_folder()
