"""What pyproject.toml cannot say without setuptools' experimental keys: the one extension module."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "spear_envs.bm25._scatter",
            ["spear_envs/bm25/_scatter.c"],
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off"],
            # Without a compiler the installation goes on: NumPy gives the same order of results, more slowly.
            optional=True,
        )
    ]
)
