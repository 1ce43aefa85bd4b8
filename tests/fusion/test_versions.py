"""What is said of versions that were not tested."""

import importlib.metadata
import logging

import pytest
import torch

from fusion import machine, process
from fusion.cli import doctor
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


def test_facts_that_are_missing_are_spoken_of_once_for_an_architecture(caplog):
    newest = gpu_facts.NEWEST
    process.warn_of_triton.cache_clear()
    with caplog.at_level(logging.WARNING, logger="fusion"):
        for version, target in [("9.9.9", "sm_90"), ("9.9.9", "sm_90"), (newest, "sm_90"), (newest, "sm_86")]:
            process.warn_of_triton(version, target)
    process.warn_of_triton.cache_clear()
    assert len(caplog.records) == 1 and "for sm_90 compiled by Triton 9.9.9" in caplog.text
    assert f"what Triton {gpu_facts.nearest('9.9.9')[0]} makes of them" in caplog.text


@pytest.mark.parametrize("architecture", ["gfx950", "gfx1100"])
def test_architectures_without_facts_have_their_tiles_by_an_estimate(architecture):
    assert process.unknown_triton(gpu_facts.NEWEST) is None
    assert "chosen by an estimate" in process.unknown_triton(gpu_facts.NEWEST, architecture)


def test_doctor_asks_for_the_architecture_that_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "of_device", lambda: machine.of_target("gfx1100"))
    assert "for gfx1100" in doctor._unknown_triton(gpu_facts.NEWEST)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor._unknown_triton(gpu_facts.NEWEST) is None
