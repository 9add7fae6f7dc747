//! A point in time as the fields of a calendar: proleptic Gregorian, UTC.

use std::time::{SystemTime, UNIX_EPOCH};

/// The values of the clock's registers. Years outside 1970 to 9999 are shown as those limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Date {
    pub(super) century: u8,
    pub(super) year_of_century: u8,
    /// The month, 1 to 12.
    pub(super) month: u8,
    /// The day, 1 to 31.
    pub(super) day: u8,
    /// The day of the week. 1 is Sunday.
    pub(super) day_of_week: u8,
    pub(super) hour: u8,
    pub(super) minute: u8,
    pub(super) second: u8,
}

const SECONDS_PER_DAY: u64 = 86_400;
/// 9999-12-31T23:59:59.
const LAST_SECOND: u64 = 253_402_300_799;
/// The number of days in a full cycle of leap years.
const DAYS_PER_400_YEARS: u64 = 146_097;
/// The number of days from 1600-03-01 to 1970-01-01. A cycle with years that begin in March starts
/// on the former.
const DAYS_1600_TO_1970: u64 = 135_080;

impl From<SystemTime> for Date {
    fn from(time: SystemTime) -> Self {
        let seconds = time
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs())
            .min(LAST_SECOND);
        let days = seconds / SECONDS_PER_DAY;
        let second_of_day = seconds % SECONDS_PER_DAY;

        // With years that begin in March, a leap day is the last of its year. So dividing by the
        // longest periods first yields the year; the clamps keep that day in its period.
        let mut day = days + DAYS_1600_TO_1970;
        let cycles = day / DAYS_PER_400_YEARS;
        day %= DAYS_PER_400_YEARS;
        let centuries = (day / 36_524).min(3);
        day -= centuries * 36_524;
        let fours = day / 1461;
        day %= 1461;
        let years = (day / 365).min(3);
        day -= years * 365;
        // Months from March are 31 30 31 30 31 31 30 31 30 31 31 days and the rest: 153 in five.
        let month_from_march = (day * 5 + 2) / 153;
        let day_of_month = day - (month_from_march * 153 + 2) / 5 + 1;
        let (month, carry) = if month_from_march < 10 {
            (month_from_march + 3, 0)
        } else {
            (month_from_march - 9, 1)
        };
        let year = 1600 + cycles * 400 + centuries * 100 + fours * 4 + years + carry;

        // Every value is below 100 here, so the conversion cannot fail.
        let byte = |value: u64| u8::try_from(value).unwrap_or(u8::MAX);
        Self {
            century: byte(year / 100),
            year_of_century: byte(year % 100),
            month: byte(month),
            day: byte(day_of_month),
            // 1970-01-01 was a Thursday.
            day_of_week: byte((days + 4) % 7 + 1),
            hour: byte(second_of_day / 3600),
            minute: byte(second_of_day / 60 % 60),
            second: byte(second_of_day % 60),
        }
    }
}
