import pytest


@pytest.fixture(scope="session")
def num_conversations(request: pytest.FixtureRequest) -> int:
    """On how many chats each property is tried."""
    return request.config.getoption("--conversations")
