"""Networks built from the same blocks are one family, whatever their names are decorated with."""

import pytest

from research.published_tables.architecture_families import architecture_family


@pytest.mark.parametrize(
    ("family", "names"),
    [
        (
            "resnet",
            "resnet50 resnetv2_50x1_bit seresnext50_32x4d legacy_senet154 wide_resnet50_2 eca_botnext26ts_256 res2net50d",
        ),
        (
            "resnet",
            "resnest50d tresnet_m cspresnet50 nf_ecaresnet101 lamhalobotnet50ts_256 resnet50_clip_gap skresnet18 resnet101",
        ),
        (
            "vit",
            "vit_base_patch16_224 deit3_small_patch16_224 beitv2_large_patch16_224 eva02_tiny_patch14_336 vit_base_resnet50d_224",
        ),
        ("regnet", "regnetx_004 regnety_040_sgn nf_regnet_b1 haloregnetz_b regnet_x_400mf"),
        (
            "efficientnet",
            "efficientnet_b0 tf_efficientnetv2_s gc_efficientnetv2_rw_t tinynet_a tf_mixnet_m",
        ),
        (
            "mobilenet",
            "mobilenetv3_large_100 tf_mobilenetv3_small_075 semnasnet_050 fbnetc_100 mobilenet_edgetpu_v2_s mobilenet_v2",
        ),
        ("maxvit", "maxvit_tiny_tf_224 maxxvitv2_nano_rw_256 coatnet_0_rw_224"),
        ("nasnet", "nasnetalarge pnasnet5large"),
        ("mlp_mixer", "mixer_b16_224 gmlp_ti16_224 resmlp_12_224"),
        ("convmixer", "convmixer_768_32"),
        ("tiny_vit", "tiny_vit_11m_224"),
        ("efficientvit", "efficientvit_b1 efficientvit_m0"),
        ("gpt", "gpt2 gpt2_distil"),
        ("t5", "t5_small"),
    ],
)
def test_related_names_are_one_family(family: str, names: str) -> None:
    assert {architecture_family(name) for name in names.split()} == {family}


def test_weights_do_not_change_the_family() -> None:
    assert architecture_family("ResNet50.a1_in1k") == architecture_family("resnet50")
    assert architecture_family("davit_base_fl") == "davit"
