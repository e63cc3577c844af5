"""`turboserve bench sequence-parallel` on two real processes, shortened to one chunk."""

from rich.console import Console

from turboserve.bench.sequence_parallel import command


def test_the_benchmark_compares_both_and_counts_bytes() -> None:
    found = command.run(chunks=1)
    assert found["broken"] == []
    assert found["largest_difference"] <= 1e-5
    assert found["forwards"] == 5
    sent = found["bytes"]
    # Beside the attentions only latents and patch channels travel, and one byte by which the donor accepts.
    assert 1 < (sent["home"] + sent["donor"]) / sent["attentions"] < 1.1
    assert sent["first_forward"] > 2 * sent["home"]
    assert found["ratio"] == found["one_worker"]["forward_s"] / found["two_workers"]["forward_s"]
    console = Console(width=100)
    with console.capture() as shown:
        console.print(command.table(found))
    assert "two workers" in shown.get()
