"""vLLM's --speculative-config: what is honoured, what is refused and why."""

import json

import pytest

from jaxspec.decoding.speculative import SpeculativeConfig
from jaxspec.errors import InputError


def test_vllms_examples_parse(tmp_path):
    text = '{"method":"eagle3","model":"amazon/X-P-EAGLE","num_speculative_tokens":10,"parallel_drafting":true}'
    parsed = SpeculativeConfig.parse(text)
    assert parsed == SpeculativeConfig(
        method="eagle3", model="amazon/X-P-EAGLE", num_speculative_tokens=10, parallel_drafting=True
    )
    file = tmp_path / "config.json"
    file.write_text(text)
    assert SpeculativeConfig.parse(str(file)) == parsed == SpeculativeConfig.parse(json.loads(text))
    dspark = SpeculativeConfig.parse(
        '{"method":"dspark","num_speculative_tokens":7,"draft_sample_method":"probabilistic",'
        '"enable_adaptive_verification":true}'
    )
    assert dspark.enable_adaptive_verification and dspark.draft_sample_method == "probabilistic"


def test_keys_without_effect_on_the_result_and_nulls_pass():
    assert SpeculativeConfig.parse({"enforce_eager": True, "model": None}) == SpeculativeConfig()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"metod": "dflash"}', "unknown key metod; the nearest known one is method"),
        ('{"num_spec_tokens": 3}', "the nearest known one is num_speculative_tokens"),
        ('{"quantization": "fp8"}', "quantization is not supported: quantised drafters are not supported"),
        ('{"fly_window_size": 3}', "fly_window_size is not supported: FLy is lossy"),
        ('{"method": "medusa"}', "method is 'medusa'; it must be one of eagle3, peagle, dflash, dspark"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens is 0; it must be a whole number from 1 to 128"),
        ('{"num_speculative_tokens": 129}', "a whole number from 1 to 128"),
        ('{"num_speculative_tokens": true}', "num_speculative_tokens is True"),
        ('{"draft_sample_method": "beam"}', "draft_sample_method is 'beam'; it must be greedy or probabilistic"),
        ('{"rejection_sample_method": "fly"}', "it must be standard, block or synthetic"),
        ('{"confidence_threshold": -0.1}', "confidence_threshold is -0.1; it must be a number from 0 to 1"),
        ('{"max_model_len": 1}', "max_model_len is 1"),
        ('{"parallel_drafting": 1}', "parallel_drafting is 1; it must be true or false"),
        ('{"synthetic_acceptance_length": 2}', "needs rejection_sample_method to be synthetic"),
        ('{"rejection_sample_method": "synthetic"}', "needs exactly one of"),
        (
            '{"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.6]}',
            "K numbers from 0 to 1, none above the one before it",
        ),
        (
            '{"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.5]}',
            "K numbers from 0 to 1, none above the one before it",
        ),
        ('{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 0.5}', "from 1 to K + 1"),
        ("[1]", "neither a JSON object nor a readable file"),
        ("{", "speculative config is not JSON"),
    ],
)
def test_wrong_values_are_refused_by_name(config, message):
    with pytest.raises(InputError, match=r"^speculative config") as error:
        SpeculativeConfig.parse(config)
    assert message in str(error.value)


def test_synthetic_rates_become_conditional():
    given = SpeculativeConfig(rejection_sample_method="synthetic", synthetic_acceptance_rates=(0.8, 0.4, 0.0))
    assert given.conditional_rates(3) == pytest.approx((0.8, 0.5, 0.0))
    with pytest.raises(InputError, match="as many numbers as K = 4"):
        given.conditional_rates(4)
    length = SpeculativeConfig(rejection_sample_method="synthetic", synthetic_acceptance_length=2.5)
    rate, *_ = length.conditional_rates(3)
    assert rate + rate**2 + rate**3 == pytest.approx(1.5)
    with pytest.raises(InputError, match=r"at most K \+ 1 = 2"):
        SpeculativeConfig(rejection_sample_method="synthetic", synthetic_acceptance_length=2.5).conditional_rates(1)
