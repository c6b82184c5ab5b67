"""What pyproject.toml cannot say without setuptools' experimental keys: the extension modules."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            f"spear_envs.bm25.{name}",
            [f"spear_envs/bm25/{name}.c"],
            depends=["spear_envs/bm25/_blocks.h"],
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off"],
            # Without a compiler the installation goes on: NumPy and Python give the same results, more slowly.
            optional=True,
        )
        for name in ("_ranking", "_words")
    ]
)
