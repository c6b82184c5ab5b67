"""The embedded catalogue: generated products, goals and instructions, without a download."""

from spear_envs.webshop.mini.files import write_files
from spear_envs.webshop.mini.generate import PRODUCTS, SEED, Record, make_records, stream_records

__all__ = ["PRODUCTS", "SEED", "Record", "make_records", "stream_records", "write_files"]
