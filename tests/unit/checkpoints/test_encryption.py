from __future__ import annotations

from pathlib import Path

import pyrage
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from tinsmith.checkpoints.encryption import check_recipients, encrypt_files
from tinsmith.errors import ValidationError


def test_every_file_is_encrypted_for_each_recipient(tmp_path: Path) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 1000}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    identities = [pyrage.x25519.Identity.generate() for _ in range(2)]

    encrypt_files(tmp_path, [str(identity.to_public()) for identity in identities])

    assert {file.name for file in tmp_path.iterdir()} == {f"{name}.age" for name in files}
    for name, content in files.items():
        encrypted = (tmp_path / f"{name}.age").read_bytes()
        assert content not in encrypted
        for identity in identities:
            assert pyrage.decrypt(encrypted, [identity]) == content


@pytest.mark.parametrize("kind", ["ed25519", "rsa"])
def test_ssh_keys_are_recipients_too(tmp_path: Path, kind: str) -> None:
    key = (
        ed25519.Ed25519PrivateKey.generate()
        if kind == "ed25519"
        else rsa.generate_private_key(65537, 2048)
    )
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (tmp_path / "x").write_bytes(b"secret")

    encrypt_files(tmp_path, [f"{public.decode()} somebody@somewhere\n"])

    identity = pyrage.ssh.Identity.from_buffer(private)
    assert pyrage.decrypt((tmp_path / "x.age").read_bytes(), [identity]) == b"secret"


def test_bad_recipients_are_rejected_by_field_without_being_shown() -> None:
    good = str(pyrage.x25519.Identity.generate().to_public())
    secret = str(pyrage.x25519.Identity.generate())
    check_recipients([good] * 10)

    for recipients, why in [
        ([], "0 keys; expected 1 to 10"),
        ([good] * 11, "11 keys; expected 1 to 10"),
        ([good, "age1nonsense"], r"recipients\[1\] is not a valid age public key"),
        (["ssh-ed25519 AAAA"], r"recipients\[0\] is not a valid age public key"),
        (["ssh-rsa " + "A" * 5000], r"recipients\[0\] has 5008 characters"),
        ([""], "is not a valid age public key"),
        ([secret], "is not a valid age public key"),
        (["age1\ud800"], "is not a valid age public key"),
        (["ssh-rsa \0"], "is not a valid age public key"),
    ]:
        with pytest.raises(ValidationError, match=why) as caught:
            check_recipients(recipients)
        assert secret not in str(caught.value)
