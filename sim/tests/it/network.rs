//! Tests of rings whose devices share a Wi-Fi channel: message times, delays by stalls, and the records of messages.

use hearth_core::cluster::{Cluster, Connection};
use hearth_core::metrics;
use hearth_profiles::Bytes;
use hearth_schema::trace::{StepKind, StepRecord, Trace};
use proptest::prelude::*;

use crate::small_rings::{
    OS, PLENTY, assert_near, assert_terms, cluster, plan, records, set_prompt, use_wifi, warm, written,
};

fn ring(devices: usize, generate: u32, channel: &str, tcp: &str) -> Cluster {
    let mut cluster = cluster("llama-8b", &vec![PLENTY; devices], generate);
    use_wifi(&mut cluster, channel, tcp);
    cluster
}

/// TCP options of a scenario: no restarts of the congestion window and no losses.
const NO_TCP_DELAYS: &str = "idle_restart: false, loss: {value: 0 %, source: t}";

fn run(cluster: &Cluster, windows: &[u32]) -> Trace {
    warm(cluster, &plan(&cluster.model, windows, OS))
}

/// Returns the mean milliseconds to send the activations of a token over Wi-Fi, computed by the formula for one
/// message.
fn hop(cluster: &Cluster, fresh: bool) -> f64 {
    let Some(Connection::Wireless(path)) = cluster.links.connection("d0", "d1") else { panic!("no Wi-Fi") };
    path.mean_message_time(cluster.model.shape.hidden_state_bytes(), fresh).as_millis()
}

#[test]
fn network_term_equals_mean_message_time() {
    let lossless = "loss: {value: 0 %, source: t}";
    // A token takes 0.48 s. With one round a connection is used once in that time, and its congestion window restarts;
    // with four rounds it is never idle for the timeout of 0.2 s. Losses are few, so their mean is uncertain.
    for (tcp, shares, hops, fresh, within) in [
        (NO_TCP_DELAYS, [4, 2, 2], 12.0, false, 0.02),
        (lossless, [4, 2, 2], 12.0, false, 0.02),
        (lossless, [16, 8, 8], 3.0, true, 0.02),
        ("", [16, 8, 8], 3.0, true, 0.12),
    ] {
        let cluster = ring(3, 400, "", tcp);
        let metrics = metrics::compute_metrics(&run(&cluster, &shares));
        let expected = hops * hop(&cluster, fresh);
        let found = metrics.terms_ms.network;
        let case = format!("tcp {{{tcp}}}, {shares:?}");
        println!("{case}: {found:.2} ms a token on the network, {expected:.2} by the formula");
        assert_near(found, expected, within, case);
        assert_terms(&metrics);
    }
}

/// A token waits for a stall once, not at every hop, so the formula for a single message overestimates the delay.
#[test]
fn each_stall_delays_a_ring_once() {
    let [clean, awdl] = ["", ", stalls: awdl"].map(|channel| {
        let cluster = ring(3, 400, channel, NO_TCP_DELAYS);
        let trace = run(&cluster, &[4, 2, 2]);
        (metrics::compute_metrics(&trace).terms_ms.network, 12.0 * hop(&cluster, true))
    });
    let (found, alone) = (awdl.0 - clean.0, awdl.1 - clean.1);
    println!("stalls take {found:.2} ms of a token, {alone:.2} if they delayed every hop separately");
    assert!(found > 0.25 * alone && found < 0.75 * alone, "{found} and {alone} ms");
}

#[test]
fn stalls_raise_tail_latency() {
    let [clean, awdl] = ["", ", stalls: awdl"].map(|channel| {
        let cluster = ring(2, 300, channel, NO_TCP_DELAYS);
        metrics::compute_metrics(&run(&cluster, &[16, 16])).tpot_ms.expect("tokens")
    });
    assert!(awdl.p50_ms - clean.p50_ms < 1.0, "{clean:?}, {awdl:?}");
    // The run has some twenty stalls, and of the 0.47 s of a token some 15 ms are sending.
    assert!(awdl.mean_ms - clean.mean_ms > 0.4 && awdl.mean_ms - clean.mean_ms < 5.0, "{clean:?}, {awdl:?}");
}

/// Returns the send record and the receive record of each message of a trace.
fn messages(trace: &Trace) -> Vec<(&StepRecord, &StepRecord)> {
    let arrival = |sent: &StepRecord| {
        let round = if sent.peer == Some(0) { sent.round + 1 } else { sent.round };
        let key = (sent.peer, sent.pass_index, Some(sent.device_index), round);
        records(trace, StepKind::Receive)
            .find(|it| (Some(it.device_index), it.pass_index, it.peer, it.round) == key)
    };
    records(trace, StepKind::Send).map(|sent| (sent, arrival(sent).expect("a receive record"))).collect()
}

proptest! {
    #![proptest_config(crate::cases(40))]

    /// In any ring and for any prompt, no message arrives before its transmission has ended, and no transmission is
    /// shorter than the time of its bytes. A second run with the same input gives the same trace.
    #[test]
    fn messages_are_transmitted_before_they_arrive(
        devices in 2usize..5, window in 1u32..9, prompt in 1u32..1500, stalls: bool, seed: u64,
    ) {
        let mut cluster = ring(devices, 3, if stalls { ", stalls: awdl" } else { "" }, "");
        cluster.seed = seed;
        let mut plan = plan(&cluster.model, &vec![window; devices], OS);
        set_prompt(&mut cluster, &mut plan, 2048, prompt);
        let trace = warm(&cluster, &plan);
        let rate = cluster.links.wifi().expect("Wi-Fi").channels[0].bandwidth.value;
        for (sent, received) in messages(&trace) {
            // Up and down, each with its overhead.
            let min = (Bytes(sent.bytes) / rate).to_nanos() * 2 + 400_000;
            prop_assert!(sent.duration_ns() >= min, "{:?}", sent);
            prop_assert!(received.end_ns >= sent.end_ns, "{:?} {:?}", sent, received);
        }
        prop_assert_eq!(written(&trace), written(&warm(&cluster, &plan)));
    }
}
