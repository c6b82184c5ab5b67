"""What pyproject.toml cannot say without setuptools' experimental keys: the extension modules."""

from setuptools import Extension, setup

SOURCES = {"_ranking": ("_ranking", "_search", "_search_avx2", "_search_avx512"), "_words": ("_words",)}

setup(
    ext_modules=[
        Extension(
            f"spear_envs.bm25.{name}",
            [f"spear_envs/bm25/{source}.c" for source in sources],
            depends=["spear_envs/bm25/_blocks.h", "spear_envs/bm25/_search.h", "spear_envs/bm25/_search.c"],
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off"],
            # Without a compiler the installation goes on: NumPy and Python give the same results, more slowly.
            optional=True,
        )
        for name, sources in SOURCES.items()
    ]
)
