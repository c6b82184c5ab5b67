"""Data that is too large for the package: its place, checked downloads, and safe unpacking.

Nothing is downloaded on import or by ``pip install``, only by ``spear data get``.
"""

from spear_envs.data.archives import unpack_archive
from spear_envs.data.fetching import fetch, fetch_locked
from spear_envs.data.files import RemoteFile, data_folder, is_offline

__all__ = ["RemoteFile", "data_folder", "fetch", "fetch_locked", "is_offline", "unpack_archive"]
