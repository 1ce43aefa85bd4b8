"""What is said of versions that were not tested."""

import importlib.metadata
import logging

import pytest
import torch

from fusion import process
from fusion.planning import gpu_facts


@pytest.fixture
def asked(monkeypatch):
    wanted = ["numpy>=1.26", "torch-mlir>=20261001; sys_platform == 'linux'", "torch<2.16,>=2.11"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.3", "2.15.0a0+git123"])
def test_tested_versions_are_not_spoken_of(version, asked):
    assert process.untested_torch(version) is None


@pytest.mark.parametrize("version", ["2.10.1", "2.9", "2.16.0", "3.0.0+cu140", "2.16.0.dev20261201"])
def test_others_are(version, asked):
    assert version in process.untested_torch(version) and "torch<2.16,>=2.11" in process.untested_torch(version)


def test_a_checkout_that_was_not_installed_says_nothing(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert process.untested_torch("2.99") is None


def test_it_is_said_once(asked, caplog):
    process.warn_of_torch.cache_clear()
    with caplog.at_level(logging.WARNING, logger="fusion"):
        process.warn_of_torch("2.99.0"), process.warn_of_torch("2.99.0"), process.warn_of_torch("2.11.0")
    assert len(caplog.records) == 1 and "2.99.0 was not tested" in caplog.text
    process.warn_of_torch.cache_clear()


def test_this_torch_is_tested():
    assert process.untested_torch(torch.__version__) is None


def test_facts_that_are_missing_are_spoken_of(caplog):
    assert process.unknown_triton(gpu_facts.NEWEST) is None
    process.warn_of_triton.cache_clear()
    with caplog.at_level(logging.WARNING, logger="fusion"):
        process.warn_of_triton("9.9.9"), process.warn_of_triton("9.9.9"), process.warn_of_triton(gpu_facts.NEWEST)
    assert len(caplog.records) == 1 and "Triton 9.9.9" in caplog.text
    process.warn_of_triton.cache_clear()
