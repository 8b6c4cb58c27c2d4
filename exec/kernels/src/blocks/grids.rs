//! The codebooks of the I-quants: tables of rows of eight or four weights.
//!
//! The weights of a codebook have three or eight levels. Row number n is the row whose level indices are the digits of
//! n, with the first weight as the least significant digit: in base 3 for three levels, in base 8 for eight. A
//! codebook contains some of the possible rows, in ascending order of their numbers. The selection is part of the
//! format (the tables `iq1s_grid` to `iq3s_grid` of ggml-common.h list the rows); here it is stored as a bitmap of the
//! possible rows.

/// The rows of `IQ1_S`: each byte is `8 * (weight + 1)`, that is 0, 8 or 16.
///
/// The factor of eight keeps a weight an integer after the format adds the shift of 1/8 or -1/8.
pub(crate) static IQ1_GRID: [[u8; 8]; 2048] = grid(IQ1_ROWS, &[0, 8, 16]);

const IQ1_ROWS: &[u8; 1642] = b"\
    55251485a0024251084531a886208aa21a082a201485501482204445251505a00282208818000882a0032aa088bbaa0a90aa0b00\
    22000aaa8c82a0084051084521888050144251088a300898a008802a0845211485204842550845012cc2a0208a26002a24a8aaa2\
    08e2af0808282800a0024228aa2820a880200a9b08b9baa820caae89a2aeaa3a7cebeababb820eb822bacad30e920222002220a8\
    8aba0a820208002a4ae0a23b22202ba200814081aa8a280822011485501582200945215485a0080223a83a2084822054425108a2\
    2008955014022a08b8a88280a04802200882a268a20228ab2a0885200882300845400045211485a00042510045012982008a822a\
    08a130140550148228084521148520020220aa2a002012b18aae28a8baa1aaa87000820a0802282202840082004880a0eab02aaa\
    c2208bba22eadaa78b8b6ea892b02aaa728b8a440c2a20488440288a2a08aa20c8cca222a2af9aa0e8a8020002002aa888002080\
    a08ba2a228baa08082320ababeb8bafeeba2a02ba2088a0a28eaa200a132020cfaa4eadeef2ba82e8dbe7eebfaf77fbfe67dbade\
    69fb27ffbf26fa12e9e18a2210aabe0e84aa08b2a80b82aeffba24e9838004622c68f2a80aa42b00022a0808e2aa120002822a0a\
    a620c9828990822800a2008c801300820808006c8aaaaabb02a6be8aa0ca02806b972ed0b2e91082102eaade2815d1a504000a82\
    008a82200801a12082aa39ba223284a0098018008aa2620281144451004521ac825014425108aa2028aa870a122a0845211405a0\
    0842510845012002a040a22200880008a2086a8a6eb8aaaa8000200a82e2c82221084450144251098a2015855014860a08aa2a2a\
    80000a4251084521a8005014425108e22088820a18822a08aaa2aa8ab08b020a2aaa20288280aa0a28082800a9880222a0be0b28\
    b8088aba4bb2aeffbaa4f8aeaa20522868b6a030e6800a022808226a6280200a02aaaa2baaeaa2a9a0a208081020a08a2200820e\
    0045211485a00a4051084521a906004aaa0208a500100d44148228084521140500088282acf220000000aa0a280aba20eaa20200\
    82480928e91400114b4551004501a802501442510888240888280a40080045011405a0024051084501";

/// Returns the rows of a codebook, given a bitmap of their numbers in hexadecimal with two digits per byte: bit n % 8
/// of byte n / 8 is set if row n is in the codebook.
const fn grid<const LENGTH: usize, const ROWS: usize>(bitmap: &[u8], levels: &[u8]) -> [[u8; LENGTH]; ROWS] {
    let mut grid = [[0; LENGTH]; ROWS];
    let (mut row, mut found) = (0, 0);
    while row < levels.len().pow(LENGTH as u32) {
        if digit(bitmap[row / 8 * 2 + 1 - row % 8 / 4]) >> (row % 4) & 1 == 1 {
            let (mut rest, mut position) = (row, 0);
            while position < LENGTH {
                grid[found][position] = levels[rest % levels.len()];
                rest /= levels.len();
                position += 1;
            }
            found += 1;
        }
        row += 1;
    }
    assert!(found == ROWS, "the bitmap has a bit for each row");
    grid
}

const fn digit(character: u8) -> u8 {
    if character.is_ascii_digit() { character - b'0' } else { character - b'a' + 10 }
}
