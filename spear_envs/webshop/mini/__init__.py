"""The embedded catalogue: products, goals and instructions made by a generator of our own, without any download."""

from spear_envs.webshop.mini.files import write_files
from spear_envs.webshop.mini.generate import PRODUCTS, SEED, Record, make_records, stream_records

__all__ = ["PRODUCTS", "SEED", "Record", "make_records", "stream_records", "write_files"]
