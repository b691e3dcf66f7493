"""Places at which a run's Parquet files can lie, each empty and of its own: an S3-compatible server on loopback too."""

import uuid
from collections.abc import Iterator

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

BUCKET = "penstock-test"


class PlainFileSystem(LocalFileSystem):
    """A remote file system that is no object store: files can be seen while they are uploaded."""

    protocol = "plain"

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("plain://"))


fsspec.register_implementation("plain", PlainFileSystem, clobber=True)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """An S3-compatible server in this process; gives its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_url(s3_server, monkeypatch) -> str:
    """A URL in a bucket of that server; the credentials are in the environment, as users have them."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # its instances keep the address of an earlier server
    filesystem = s3fs.S3FileSystem()
    if not filesystem.exists(BUCKET):
        filesystem.mkdir(BUCKET)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def _url_of(kind: str, request, tmp_path) -> str:
    if kind == "s3":
        return request.getfixturevalue("s3_url")
    if kind == "memory":
        return f"memory://{uuid.uuid4().hex}"
    place = str(tmp_path / "elsewhere")
    return place if kind == "path" else f"{kind}://{place}"


@pytest.fixture(params=["path", "file", "memory", "s3"])
def store_url(request, tmp_path) -> str:
    """One URL of each kind that a run's files may have."""
    return _url_of(request.param, request, tmp_path)


@pytest.fixture(params=["path", "file", "memory", "plain", "s3"])
def storage_url(request, tmp_path) -> str:
    """One URL of each kind that a storage can be at, as those of weights."""
    return _url_of(request.param, request, tmp_path)
