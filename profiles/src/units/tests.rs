//! Tests of parsing, printing and rounding quantities with units.

use proptest::prelude::*;

use super::*;

#[test]
fn quantities_parse_with_units() {
    assert_eq!("2.98 GB/s".parse(), Ok(BytesPerSecond(2.98e9)));
    assert_eq!("4.1 GiB".parse(), Ok(Bytes(4_402_341_478)));
    assert_eq!("5 ms".parse(), Ok(Seconds(0.005)));
    assert_eq!("480 Mbit/s".parse(), Ok(BytesPerSecond(60e6)));
    assert_eq!("1e3 B".parse(), Ok(Bytes(1000)));
    assert_eq!("90 %".parse(), Ok(Fraction(0.9)));
    assert_eq!("9 /min".parse(), Ok(PerSecond(0.15)));
}

#[test]
fn bare_numbers_and_wrong_units_are_refused() {
    assert!(matches!("4096".parse::<Bytes>(), Err(UnitError::MissingUnit { .. })));
    assert!(matches!("4096 ms".parse::<Bytes>(), Err(UnitError::UnknownUnit { .. })));
    assert!(matches!("-1 s".parse::<Seconds>(), Err(UnitError::Number { .. })));
    assert!(matches!("inf s".parse::<Seconds>(), Err(UnitError::Number { .. })));
    assert!(matches!("1e400 s".parse::<Seconds>(), Err(UnitError::Number { .. })));
    assert!(matches!("2.5 layers".parse::<Layers>(), Err(UnitError::Number { .. })));
}

#[test]
fn likely_unit_is_suggested() {
    let error = |text: &str| text.parse::<BytesPerSecond>().unwrap_err().to_string();
    for (written, meant) in [
        ("100 Mbps", "Mbit/s"),
        ("1 GBps", "GB/s"),
        ("1 gbps", "Gbit/s"),
        ("2 Gb/s", "Gbit/s"),
        ("3 KiBps", "KiB/s"),
    ] {
        assert!(error(written).ends_with(&format!("did you mean `{meant}`?")), "{}", error(written));
    }
    assert!(error("400 MB").contains("use one of B/s, kB/s"), "{}", error("400 MB"));
    let error = |text: &str| text.parse::<Bytes>().unwrap_err().to_string();
    assert!(error("4 gib").ends_with("did you mean `GiB`?"), "{}", error("4 gib"));
    assert!(error("1 k").contains("use one of"), "{}", error("1 k"));
}

#[test]
fn rounding_to_four_digits() {
    assert_eq!(FlopsPerSecond(27_247_151_540.762_77).rounded().spell(), "27.25 GFLOP/s");
    assert_eq!(Seconds(57_011.052e-9).rounded().spell(), "57.01 us");
    assert_eq!(Fraction(0.032_204).rounded().spell(), "3.22 %");
    assert_eq!(BytesPerSecond(0.0).rounded(), BytesPerSecond(0.0));
    assert_eq!(Layers(80).rounded(), Layers(80));
}

#[test]
fn short_times_are_not_spelled_in_minutes() {
    // About 51 us; its text would be shorter in minutes.
    assert!(!Seconds(8.5e-7 * 60.0).spell().ends_with("min"));
    assert_eq!(Seconds(90.0 * 60.0).spell(), "90 min");
    assert_eq!(Fraction(1e-6).spell(), "0.0001 %");
}

#[test]
fn bytes_over_rate_are_seconds() {
    // 400 MB at 200 MB/s.
    assert_eq!(Bytes(400_000_000) / BytesPerSecond(200e6), Seconds(2.0));
    assert_eq!(Flops(3e9) / FlopsPerSecond(1e9), Seconds(3.0));
}

#[test]
fn to_nanos_rounds_to_nearest() {
    for nanos in
        [0.0, 0.2, 0.499_999_999_999_999_94, 0.5, 1.5, 2.5, 1e6 + 0.5, 9e15, 1e19, 1e300, f64::INFINITY]
    {
        let seconds = Seconds(nanos * 1e-9);
        assert_eq!(seconds.to_nanos(), (seconds.0 * 1e9).round() as u64, "{nanos}");
    }
    assert_eq!((Seconds(-3e-9).to_nanos(), Seconds(f64::NAN).to_nanos()), (0, 0));
}

#[test]
fn display_has_three_digits() {
    assert_eq!(Bytes(4_402_341_478).to_string(), "4.10 GiB");
    assert_eq!(Seconds(0.674).to_string(), "674 ms");
    assert_eq!(Bytes(0).to_string(), "0 B");
}

proptest! {
    #[test]
    fn spelling_round_trips(bytes in 0u64..(1 << 53), seconds in 0.0f64..1e6, rate in 0.0f64..1e13) {
        prop_assert_eq!(Bytes(bytes).spell().parse::<Bytes>().unwrap(), Bytes(bytes));
        prop_assert_eq!(Seconds(seconds).spell().parse::<Seconds>().unwrap(), Seconds(seconds));
        prop_assert_eq!(BytesPerSecond(rate).spell().parse::<BytesPerSecond>().unwrap(), BytesPerSecond(rate));
    }

    #[test]
    fn rounded_share_round_trips(share in 0.0f64..3.0) {
        let share = Fraction(share).rounded();
        let text = share.spell();
        prop_assert_eq!(text.parse::<Fraction>().unwrap(), share);
        prop_assert!(text.len() <= "0.0001234 %".len(), "{}", text);
    }

    #[test]
    fn share_round_trips_within_two_epsilon(share in 0.0f64..10.0) {
        let back: Fraction = Fraction(share).spell().parse().unwrap();
        prop_assert!((back.0 - share).abs() <= share * 2.0 * f64::EPSILON);
    }

    #[test]
    fn parser_never_panics(text in "\\PC{0,24}") {
        let _ = text.parse::<Bytes>();
        let _ = text.parse::<Layers>();
    }
}

#[test]
fn durations_are_in_units_that_people_use() {
    let texts = [0.5, 10.8, 59.9, 896.2, 7500.0].map(|seconds| Seconds(seconds).in_words());
    assert_eq!(texts, ["500 ms", "10.8 s", "1 min 0 s", "14 min 56 s", "2 h 5 min"]);
}
